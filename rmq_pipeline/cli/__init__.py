"""Command line ``rmq``: one command per verb of the broker, in modules by noun."""


def main() -> None:
    """Run the command line of this process; the script ``rmq`` calls this function."""
    from rmq_pipeline.cli.app import run

    run()
