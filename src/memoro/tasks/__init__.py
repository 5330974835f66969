"""Tasks and what belongs to them: specs, task files, who sees whom.

spec: names, labels, sizes · task: Task, new_task, ensembles · mask: the paper's mask · ridge, readout: read-outs in
closed form · record: the file format · taskfile: save_task, load_task and bundles · hub: tasks on the hub, model
cards · importing: import_tasks
"""
