"""The entry point of ``python -m swarm_client``, with the commands of ``swarm_cli/command_line.py``."""

if __name__ == "__main__":
    from swarm_protocol.process.signals import exit_on_interrupt

    exit_on_interrupt()  # before the next import, which takes seconds

    from swarm_cli.command_line import main

    main()
