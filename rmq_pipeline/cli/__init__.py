"""The command line ``rmq``: a file per noun, each command a verb of the broker."""


def main() -> None:
    """Run the command of this process's arguments; what the script ``rmq`` calls."""
    from rmq_pipeline.cli.app import run

    run()
