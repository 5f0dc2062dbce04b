"""Run the command: `python -m mldec.summary`."""

from mldec.summary import main

if __name__ == "__main__":
    main()
