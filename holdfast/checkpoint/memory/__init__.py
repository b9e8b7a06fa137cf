"""Images: snapshots in shared memory that outlive the process that wrote them."""
