"""`python -m healthd.worker` begins here: a daemon whose files were replaced also starts its workers with it."""

from healthd.work.worker import main

if __name__ == "__main__":
    main()
