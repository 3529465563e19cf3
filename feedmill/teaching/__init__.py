"""Teach the workers from people's answers: which posts to ask about, the answers, fitting a head,
and deploying it. A process of its own fits it (`lesson.py`): only that one imports torch.
"""
