"""What a replica tells of its fleet: in its log, and by the metrics of each worker."""
