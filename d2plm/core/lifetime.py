from d2plm.core.processes import for_children as for_children  # of pipelines.run_here alone
