"""Run the command: `python -m mldec.report`."""

from mldec.report import main

if __name__ == "__main__":
    main()
