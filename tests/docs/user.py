"""A user's program. It is not run: mypy checks it as it checks a user's, by memoro's types alone (test_types.py).

`type: ignore` marks mistakes that mypy must find: it warns where there is nothing to ignore.
"""

from typing import Any, assert_type

import torch

import memoro
from memoro.answer import AnswerDict
from memoro.engine.verify import Verification
from memoro.training import TrainResult

# What train returns depends on what it is given.
result = memoro.train("photos/pets", epochs=5, lr=[0.001, 0.003], rank=8, folder="runs/pets", cache=False)
assert_type(result, TrainResult)
several = memoro.train({"pets": "photos/pets", "rooms": "rooms.zip"}, regime="readout")
assert_type(several, dict[str, TrainResult])
columns = memoro.train("photos.csv", label_column=["species", "size"])
assert_type(columns, dict[str, TrainResult])
one = memoro.train("photos.csv", label_column="species", backbone=torch.nn.Identity())
assert_type(one, TrainResult)

memoro.train("photos/pets", epoch=5)  # type: ignore[call-overload]
memoro.train("photos/pets", epochs="five")  # type: ignore[call-overload]
memoro.train("photos/pets", optimizer="adam")  # type: ignore[call-overload]
memoro.train("photos/pets", backbone=3)  # type: ignore[call-overload]

# What was trained has documented fields.
task = result.task
assert_type(task, memoro.Task)
assert_type(task.name, str)
assert_type(result.metrics, dict[str, Any])
accuracy = result.accuracy  # type: ignore[attr-defined]

backbone = memoro.load_backbone("memoro-tiny", device="cpu")
assert_type(backbone, memoro.Backbone)
fitted = memoro.fit(backbone, memoro.new_task(backbone, "pets", ["cat", "dog"]), "photos/pets", lr=0.1, epochs=2)
assert_type(fitted, TrainResult)
memoro.fit(backbone, task, "photos/pets", learning_rate=0.1)  # type: ignore[call-arg]
memoro.new_task(backbone, "pets", labels=["cat"], init="zero")  # type: ignore[arg-type]

# So have answers.
model = memoro.compose(backbone, [task, memoro.load_task("rooms.safetensors")])
answers = model.predict(["photo.jpg"])
assert_type(answers, list[dict[str, AnswerDict]])
assert_type(answers[0]["pets"]["label"], str)
assert_type(answers[0]["pets"]["probabilities"], dict[str, float])
label = answers[0]["pets"]["lable"]  # type: ignore[typeddict-item]
assert_type(model(torch.zeros(1, 3, 112, 112)), dict[str, torch.Tensor])
assert_type(model.verify(torch.zeros(1, 3, 112, 112)), Verification)
for row in model.predict_stream("photos/"):
    assert_type(row.answers["pets"].unfamiliar, bool | None)
assert_type(memoro.Client().predict("photo.jpg"), list[dict[str, AnswerDict]])

splits = memoro.load_data("photos.csv", label_column="species", seed=1, kind="class")
memoro.load_data("photos.csv", label_colum="species")  # type: ignore[call-arg]
memoro.load_data("photos.csv", kind="klass")  # type: ignore[arg-type]
