"""Word lists behind friendly names. Order and content are frozen: a changed list would rename everybody."""

ADJECTIVES = (
    "amber brave brisk bold calm clear clever cosy crisp dapper deep eager early fair fleet fond frosty gentle glad "
    "golden grand green happy hardy honest humble jolly keen kind late light lively loyal lucky mellow merry mild "
    "misty modest neat nimble noble patient plain polite prime proud quick quiet rapid ready rosy round royal rustic "
    "sage sharp shy silent silver sleek smart snug sober soft solid spry steady still stout strong sunny sure swift "
    "tall tender tidy trusty upright vivid warm wary whole wild wise witty young zesty"
).split()
ANIMALS = (
    "ant badger bat bear beaver bee bison boar bream carp cat civet cod colt condor coot crab crane crow deer dingo "
    "dipper dove duck eagle eel egret elk emu ermine falcon ferret finch fox frog gecko gibbon goat goose grebe grouse "
    "gull hare hawk heron hoopoe horse hound ibex ibis iguana jackal jay kestrel kite kiwi koala lark lemur lion lizard "
    "llama lynx magpie marten mink mole moose moth mouse mule newt okapi oriole osprey otter owl panda perch pigeon "
    "pika pike plover pony puffin puma quail rabbit raven robin rook salmon seal shrew skate skink sloth snail snipe "
    "sparrow squid stag starling stoat stork swan swift tapir teal tern thrush tiger toad trout turtle viper vole "
    "walrus wasp weasel whale wolf wombat wren yak zebra"
).split()
