"""What `rmq up` loads where no project is: the broker's background work, and no pipeline."""

from rmq_pipeline.orchestration.definitions import definitions

defs = definitions()
