"""x"""

TEXTS = {}
FIGURES = {}
PICTURES = {}
