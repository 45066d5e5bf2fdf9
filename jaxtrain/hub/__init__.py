"""Import and export of Hugging Face weights, driven by one declarative table per model family.

`mapping` describes how a hub tensor maps to a parameter, `fields` how config.json maps to model settings, `family` what
a family's table contains; `families` holds the tables. `folder` reads slices of safetensors files, `load` fills sharded
parameters from them, `save` writes them back, and `runs` implements the verbs `import-hf` and `export-hf`.
"""
