"""Child processes: who starts them, with which environment, and what they answer. All of them end with the process that
started them.

| file | starts | ends it |
|---|---|---|
| `child` | a stage of `python -m tasks`, DVC, or `stratagem` of another checkout, for one thing | its own end |
| `dvc` | `dvc_program` by way of `child`; `dvc status` | its own end |
| `group` | on this machine `python -m tasks serve`, `assist` or `tf_server`: a member of a strategy | `cluster` |
| `remote_members` | an engine's own process, which starts such members on other machines | `group` |
| `model_loader` | by way of `child`, `python -m tasks load_back`, which loads models back | the stage process |

`stages` is the table of what a stage process can be asked. `client` asks; `cluster` sends the request to the members
of a strategy, which `group` holds, and restarts them; `serve` and `tracked` are the side of the stage process.
"""
