"""Entry point for `python -m healthd.agent.worker`, which the daemon starts as its worker process."""

from healthd.agent.worker.process import main

if __name__ == "__main__":
    main()
