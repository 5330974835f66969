"""One plain pass of the backbone, and a thin second stream with one token per task that reads its keys and values.

plan: who attends to whom · bank: memory as keys and values · streams: the two streams · composition: compose ·
answers: logits become answers · explain: a task's attention · verify: the base is unchanged · export: ONNX files ·
featurestore: base passes kept on disk
"""
