"""The archive: Parquet files of messages, their indexes and manifests; needs no broker."""
