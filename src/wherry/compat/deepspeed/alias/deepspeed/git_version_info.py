from wherry.compat.deepspeed import VERSION as version

git_hash = git_branch = None
installed_ops: dict = {}
compatible_ops: dict = {}
