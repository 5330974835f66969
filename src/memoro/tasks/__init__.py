"""Tasks and what belongs to them: specs, task files, who sees whom, import of the public reproduction.

spec: what every model of one task has · task: Task, new_task · mask: the paper's mask · record: what files have in
common · taskfile: save_task, load_task and bundles · hub: files of the hub · card: model cards · reproduction:
import_tasks
"""
