"""Which edit families training may use, and which it must never see.

A copy detector that is tested with the edits it was trained on shows how well it knows the test.
The report therefore has two columns: families that training uses, and families held out. The split
was fixed before the first run that used it and never moves: no augmentation of the trainer makes
an edit of a family in ``UNSEEN``. A new model ships only if it is better in that column.

``SEEN`` names what the trainer has an augmentation for, made by other code than the test's.
"""

SEEN = (
    "crop",
    "flip",
    "turn",
    "perspective",
    "light",
    "gray",
    "channels",
    "posterize",
    "solarize",
    "emboss",
    "blur",
    "noise",
    "pixelize",
    "jpeg",
    "text",
    "stickers",
    "stripes",
    "occlusion",
    "border",
    "collage",
    "backdrop",
    "interface",
)

UNSEEN = (
    "contour",  # edges drawn as lines, alone or over the image
    "halftone",  # dots of different size on paper
    "moire",  # interference of two fine gratings, as on a photographed screen
    "wave",  # rows and columns displaced by a sine
    "swirl",  # turned more the nearer to the centre
    "motion_blur",  # along a line
    "zoom_blur",  # along rays from the centre
    "frosted",  # pixels shuffled within a small radius
    "duotone",  # brightness mapped to a gradient of two or three colours
    "shifted_strips",  # rows of pixels moved sideways, as a broken video shows them
    "painting",  # the most frequent colour of a neighbourhood
    "cut_out",  # a circle, heart or rounded shape of the image on a plain ground
)
