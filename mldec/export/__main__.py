"""Run the command: `python -m mldec.export`."""

from mldec.export import main

if __name__ == "__main__":
    main()
