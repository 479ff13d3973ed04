"""Multimodal (MIMO) training: model families, data sources and the heterogeneous loop."""
