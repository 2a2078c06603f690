"""The entry point of ``python -m swarm_client``; see ``command_line.py``."""

if __name__ == "__main__":
    from swarm_protocol.process.signals import exit_on_interrupt

    exit_on_interrupt()

    from swarm_cli.command_line import main

    main()
