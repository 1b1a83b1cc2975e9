"""Where `python -m healthd.live` begins: the daemon starts it."""

from healthd.live.process import main

if __name__ == "__main__":
    main()
