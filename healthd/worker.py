"""Where `python -m healthd.worker` begins: a daemon that runs over newer files starts its workers so too."""

from healthd.work.worker import main

if __name__ == "__main__":
    main()
