"""The archive: Parquet files of messages, their index and their manifest, without a broker."""
