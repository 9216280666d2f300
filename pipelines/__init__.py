"""The Kubeflow pipeline; every step calls one function of `d2plm`."""
