"""The entry point of ``python -m swarm_training.experts``; see ``command_line.py``."""

if __name__ == "__main__":
    from swarm_protocol.process.signals import exit_on_interrupt

    exit_on_interrupt()

    from swarm_training.experts.command_line import main

    main()
