"""Hugging Face weights in and out: one declarative table a family, and three rooms that read the tables.

`rows` says how a tensor of the hub lies in a parameter, `fields` how config.json and model settings correspond,
`family` what a family is made of; `families` are the tables. `folder` reads safetensors by slices, `load` fills
sharded parameters from them, `save` writes them back, `runs` are the verbs.
"""
