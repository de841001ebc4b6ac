"""Two texts of unrelated short passages, such as a retriever might return: what a chunk's KV is computed behind.

Written for this project. Every passage is of another kind (biography, place, contract, manual, forum, science, news,
history), so that what a chunk takes over from them is what any neighbours would give it.
"""

from __future__ import annotations

NEUTRAL_PASSAGES = (
    """\
Marta Lindqvist (born 4 March 1931) was a Swedish bridge engineer and teacher. She grew up in a fishing village, \
studied in Gothenburg, and in 1967 designed the first cable-stayed road bridge of her province. Two of her \
students later founded the firm that still inspects it every spring.

The town of Varenne lies on the left bank of the river, 38 kilometres north of the capital. Its population was \
11,204 at the last census. A weekly market is held in front of the old corn exchange; the railway station opened \
in 1874 and was rebuilt after the flood of 1953.

7.2 Either party may end this Agreement by giving the other sixty (60) days' written notice. The Supplier shall \
return all Confidential Information within ten business days of the end of the term, and shall confirm in \
writing that no copy has been kept, except where the law requires otherwise.

To replace the filter, switch the pump off and wait until the pressure gauge shows zero. Unscrew the cover (B) \
by turning it to the left, take out the cartridge, and clean the seat with a dry cloth. Never use oil on the \
sealing ring. Tighten the new cartridge by hand only.""",
    """\
Question: Why does my printer print blank pages? Answer: Most often an ink channel is dry. Open the menu, choose \
Maintenance, then Clean heads, and let it run twice. If the pages stay blank, check that the tape has been taken \
off the new cartridge, and that the right paper size is set.

A glacier forms where more snow falls in winter than melts in summer. Under its own weight the snow turns to \
ice, and the ice begins to flow, a few centimetres a day. The rock that it carries is left behind in ridges, \
from which former climates can be read.

The city council voted on Tuesday, by 23 to 18, to build 400 flats on the site of the old brewery. Work is to \
start next autumn. Neighbours had collected signatures against the plan because of traffic; the mayor promised a \
new tram stop and a park of two hectares.

In 1702 a glass maker named Tobias Renn received the right to cut timber in the royal forest. Within ten years \
he had three furnaces and sixty workers, most of them from Bohemia. His bottles were sold as far as Lisbon. \
After a fire in 1731 the works moved to the valley, close to the new canal, and the village was given up.""",
)
