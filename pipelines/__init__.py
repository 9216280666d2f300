"""The KFP pipeline: definitions alone; every step calls one function of `d2plm`."""
