"""D2PLM trains protein language models by discrete diffusion and discrete flow matching."""

__version__ = "0.1.0"
