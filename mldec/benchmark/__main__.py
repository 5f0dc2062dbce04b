"""Run the command: `python -m mldec.benchmark`."""

from mldec.benchmark import main

if __name__ == "__main__":
    main()
