"""The main job: train a small vision-language model to answer questions about real digits."""
