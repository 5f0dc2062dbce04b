"""Run the command: `python -m mldec.predict`."""

from mldec.predict import main

if __name__ == "__main__":
    main()
