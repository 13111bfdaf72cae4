"""Repeats published private trainings: data, features, networks, rows, both engines, table.

| module | |
| --- | --- |
| `rows` | the trainings, with what was published and where |
| `data` | data sets from files that a machine has |
| `scattering` | the scattering transform |
| `networks` | the networks by name |
| `views`, `synthetic` | moved and mirrored images, pretraining on dead leaves |
| `train` | one run, by this package or by Opacus |
| `texts` | language models, LoRA, public and private text |
| `results`, `picture` | tables, and accuracy over ε |
"""
