"""Open a data set from a folder, parquet shards, an archive or the Hub."""
