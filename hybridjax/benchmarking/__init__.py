"""What the three ``hybridjax.bench_*`` commands share: workloads, load, statistics, reports."""
