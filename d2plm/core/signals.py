from d2plm.core.processes import handled as handled  # of pipelines.run_here alone
