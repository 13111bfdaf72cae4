"""Which architectures train privately in their default settings: `docs/matrix.md` is its result.

Files:

    __main__     the command: trains each row, and writes the page
    trial        one row: a private step beside its definition, two steps, and changes that help
    configs      tiny configurations of Hugging Face models
    text         language models
    senses       models for images, video, sound, and images with text
    adapters     PEFT's adapters
    images       classifiers of torchvision and timm
    page         the outcomes as a page, family by family
"""
