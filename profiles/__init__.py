"""Measuring this machine: protocol, costs of parts, benches against peers. Importing it loads no kernels."""
