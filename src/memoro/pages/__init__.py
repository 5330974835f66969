"""HTML pages: the style that reports, the demo and the server share.

elements: tags that escape what they contain, tables, images, the page itself · charts: SVG charts · style.css
"""
