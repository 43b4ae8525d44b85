"""`python -m fnrfl` is `fnrfl`."""

from fnrfl.cli import main

if __name__ == "__main__":
    main()
