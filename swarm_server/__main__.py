"""The entry point of ``python -m swarm_server``; see ``command_line.py``."""

if __name__ == "__main__":
    from swarm_protocol.process.signals import exit_on_interrupt

    exit_on_interrupt()

    import argparse
    from collections.abc import Callable

    from swarm_server.command_line import main

    def _hold_stage(args: argparse.Namespace) -> Callable[[], None]:
        from swarm_training.stages.front import serve_stage

        return serve_stage(args)

    main(train=_hold_stage)
