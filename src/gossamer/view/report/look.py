"""The look of a report: a style sheet without fonts, pictures or programs, for light and dark, screen and paper."""

STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfa; --raised: #f1f2ee; --ink: #20252b; --soft: #5a636d;
  --rule: #d8dbd5; --link: #0b5c86; --bad: #a4261c; --note: #7a5200; --c1: #0b6e99; --c2: #b4490c; --c3: #6d4fb3;
  --c4: #2f7d32; --c5: #a03070; --c6: #6b6b00; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --raised: #1f242a; --ink: #e3e6ea; --soft: #a0a9b3;
  --rule: #363d45; --link: #7cc4ea; --bad: #ff9a8f; --note: #e8bd6a; --c1: #5db9e6; --c2: #f0955c; --c3: #b39df0;
  --c4: #7fcf82; --c5: #ec8fc0; --c6: #d0cf60; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
.page { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; border-radius: 2px; }
.skip { position: absolute; left: -100rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--raised); padding: .5rem 1rem; z-index: 1; }
header p { margin: .2rem 0; color: var(--soft); }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .8rem; padding-bottom: .25rem; border-bottom: 1px solid var(--rule); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: 0; margin: 1rem 0 0; }
p { max-width: 46rem; overflow-wrap: anywhere; }
.note, .bad { border-left: 4px solid var(--note); background: var(--raised); padding: .5rem .8rem; }
.bad { border-color: var(--bad); white-space: pre-wrap; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.6rem, 1fr)); gap: .7rem; margin: 0; }
.tiles div { background: var(--raised); border: 1px solid var(--rule); border-radius: 6px; padding: .55rem .8rem; }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .3rem 1.4rem; margin: 0; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .93rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1.3rem .3rem 0; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; }
.figure { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.figure { white-space: normal; }
pre { background: var(--raised); border: 1px solid var(--rule); border-radius: 6px; padding: .7rem .9rem;
  overflow-x: auto; max-height: 30rem; font-size: .88rem; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--link); }
.chart { margin: 1.4rem 0 1.8rem; }
figcaption { font-weight: 600; }
.unit, .remark { color: var(--soft); font-weight: 400; font-size: .9rem; }
.remark { margin: .3rem 0 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .3rem 0 0; padding: 0;
  font-size: .9rem; }
.key { display: inline-block; width: 1.3rem; height: 0; border-top: 3px solid; margin-right: .45rem;
  vertical-align: middle; }
.frame { display: grid; grid-template-columns: 4.6rem 1fr; grid-template-rows: 15rem 1.6rem; margin-top: .7rem; }
.drawing { border-left: 1px solid var(--soft); border-bottom: 1px solid var(--soft); overflow: hidden; }
svg { display: block; width: 100%; height: 100%; }
svg path { fill: none; vector-effect: non-scaling-stroke; }
.ys, .xs { position: relative; color: var(--soft); font-size: .8rem; font-variant-numeric: tabular-nums; }
.xs { grid-column: 2; }
.ys span { position: absolute; right: .5rem; transform: translateY(-50%); white-space: nowrap; }
.xs span { position: absolute; top: .2rem; transform: translateX(-50%); }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { stroke-width: 2; stroke-linejoin: round; }
.noise { stroke-width: 1; opacity: .35; }
.dots { stroke-width: 5.5; stroke-linecap: round; }
.c1 { stroke: var(--c1); border-color: var(--c1); } .c2 { stroke: var(--c2); border-color: var(--c2); }
.c3 { stroke: var(--c3); border-color: var(--c3); } .c4 { stroke: var(--c4); border-color: var(--c4); }
.c5 { stroke: var(--c5); border-color: var(--c5); } .c6 { stroke: var(--c6); border-color: var(--c6); }
svg .c2 { stroke-dasharray: 9 3; } svg .c3 { stroke-dasharray: 3 3; } svg .c4 { stroke-dasharray: 12 3 3 3; }
svg .dots { stroke-dasharray: none; }
.key.c2, .key.c4 { border-top-style: dashed; } .key.c3 { border-top-style: dotted; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
@media (max-width: 34rem) { .facts { grid-template-columns: 1fr; gap: 0; } .facts dd { margin-bottom: .5rem; }
  .frame { grid-template-columns: 3.7rem 1fr; grid-template-rows: 12rem 1.6rem; } }
@media print { nav, .skip { display: none; } body { background: none; } h2 { break-after: avoid; }
  .chart { break-inside: avoid; } }
"""
