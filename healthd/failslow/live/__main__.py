"""Entry point of `python -m healthd.failslow.live`, which the daemon starts."""

from healthd.failslow.live.process import main

if __name__ == "__main__":
    main()
