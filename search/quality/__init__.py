"""Predicted quality of a shape in nats per token, each term in a file of its own with its evidence beside it.

    Q = F4(equivalent shape, T) · m_attn + dL_vocab + dL_kv + dL_tie + dL_share + dL_quant + dL_head        lower is better

``model.py`` puts them together. Every term is a small function with a source, a status (published, own fit, judgement), the
range its evidence covers, and other readings of that evidence, from which the interval comes. docs/quality.md shows how
well it ranks published shapes and what may not be claimed.
"""
