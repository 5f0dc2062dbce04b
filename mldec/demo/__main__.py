"""Run the command: `python -m mldec.demo`."""

from mldec.demo import main

if __name__ == "__main__":
    main()
