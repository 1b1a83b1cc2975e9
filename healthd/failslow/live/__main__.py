"""Where `python -m healthd.failslow.live` begins: the daemon starts it."""

from healthd.failslow.live.process import main

if __name__ == "__main__":
    main()
