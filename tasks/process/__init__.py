"""Child processes: who starts them, with which environment, and what they answer. All of them end with the process that
started them.

| file | starts | ends it |
|---|---|---|
| `child` | a stage of `python -m tasks`, DVC, or `stratagem` of another checkout, for one thing | its own end |
| `dvc` | `dvc_program` by way of `child`; `dvc status` | its own end |
| `member` | on this machine `python -m tasks serve`, `assist` or `tf_server`: a member of a strategy | `group` |
| `remote_members` | an engine's own process, which starts such members on other machines | `group` |
| `model_loader` | a fork of the stage process, which loads models back | the stage process |

`group` holds the members of one strategy, `cluster` sends requests to them and restarts them, `client` is the stages as
the rest of the program calls them; `serve` and `tracked` are the other side, inside the stage process.
"""
