"""Who uses which records: shards that are lent, and what was used of each data set."""
