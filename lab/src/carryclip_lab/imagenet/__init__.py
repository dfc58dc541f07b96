"""The paper's ResNet50 v2 on ImageNet: a recipe that runs from a small image folder to many GPUs."""
