"""Run the command: `python -m mldec.publish`."""

from mldec.publish import main

if __name__ == "__main__":
    main()
