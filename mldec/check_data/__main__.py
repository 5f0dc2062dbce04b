"""Run the command: `python -m mldec.check_data`."""

from mldec.check_data import main

if __name__ == "__main__":
    main()
